"""DreamZero: one causal video transformer that denoises the next frames and the next actions together."""
