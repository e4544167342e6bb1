# SPDX-License-Identifier: Apache-2.0
"""An optimizer whose state is sharded over ranks, and the shards that it updates."""
