"""The step of a unit: buffers, buckets, states and hooks."""
