"""GR00T N1.7 (NVIDIA/Isaac-GR00T): a vision-language backbone and a diffusion transformer for many robots."""
