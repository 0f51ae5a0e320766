"""Robot profiles: how a robot's own units map to a model's."""
