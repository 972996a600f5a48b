# SPDX-License-Identifier: Apache-2.0
"""One host's part of a job: a process tree, its servers, its streams, and how they are dumped and restored.

Nothing here knows of other hosts, nor of the job's phase: devproxy.control has those.
"""
