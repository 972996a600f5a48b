# SPDX-License-Identifier: Apache-2.0
"""What a job's coordinator (control/coordinator.py) is made of: what it knows of the job, and what each verb does."""
