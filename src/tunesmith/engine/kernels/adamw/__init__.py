"""A step of AdamW over many parameters: gradient norms, and the update with clipping and write-back, in few passes."""
