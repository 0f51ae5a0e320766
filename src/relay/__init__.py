"""Robot-policy inference: send what the robot sees, get the next actions back."""

__version__ = "0.1.0"
