"""The suite of whole training steps: forward, loss, backward, clipping, fused AdamW, ``zero_grad``."""
