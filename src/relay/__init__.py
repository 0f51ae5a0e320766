"""Robot-policy inference: send what the robot sees, get the next actions back."""

from relay.client.async_policy import AsyncPolicy
from relay.client.policy import Policy
from relay.client.policy_client import PolicyClient
from relay.protocol.images import Codec

__version__ = "0.1.0"

__all__ = ["AsyncPolicy", "Codec", "Policy", "PolicyClient", "__version__"]
