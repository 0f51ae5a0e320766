"""π0 and π0.5: network, sampler, prompts, images and checkpoints."""
