"""The software GPU."""
