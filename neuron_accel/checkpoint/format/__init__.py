# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint: safetensors, the manifest, and reading any slice of any tensor."""
