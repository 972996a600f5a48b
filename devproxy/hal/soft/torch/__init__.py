"""PyTorch over the software GPU."""
