"""The built-in robot: a small simulation, its expert, its trained policy and the report."""
