"""Checkpoints: how they are written so that none is ever half there, and in which form."""
