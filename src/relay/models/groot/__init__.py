"""GR00T N1.7: network, sampler, observations, embodiments and checkpoints."""
