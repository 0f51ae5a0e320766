"""Bytes to typed messages and back: markers, messages, images, limits. No I/O, no threads, no torch."""
