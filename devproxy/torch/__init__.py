# SPDX-License-Identifier: Apache-2.0
"""PyTorch behind the proxy: the client plugin, and the executors that run its operators in the server."""
