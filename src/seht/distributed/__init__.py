"""Several processes, one model: DDP (``ddp``, ``ranks``) and FSDP2 (``fsdp``, ``fsdp_passes``).

For the engines and the penalty.
"""
