"""PyTorch behind the proxy: the client plugin, and the executors that run its operators in the server."""
