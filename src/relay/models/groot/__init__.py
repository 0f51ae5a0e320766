"""GR00T N1.7 (NVIDIA Isaac GR00T): network, observations, actions, checkpoints."""
