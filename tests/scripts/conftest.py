# SPDX-License-Identifier: Apache-2.0
"""Public training scripts, unmodified, from a folder of the user's: `make test-scripts FOLDER=DIR`. make test runs the
stand-ins alone (tests/scripts/stand_ins), which are small scripts of ours in the same shapes."""
