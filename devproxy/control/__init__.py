# SPDX-License-Identifier: Apache-2.0
"""Job control: the coordinator's interface, the agent's and the daemon's gRPC services, and their client."""
