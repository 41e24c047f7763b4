"""MATHS ROOM: the batched sampler, in three twins with the same results. Knows nothing of the other rooms."""
