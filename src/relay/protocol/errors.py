"""What can be wrong with a message, as three exceptions.

ProtocolError(ValueError)
├── InvalidPayload      the bytes cannot be decoded into a request
└── ObservationError    decoded, but not acceptable: names the field, what came and what is expected
"""


class ProtocolError(ValueError):
    """A message that cannot be answered with actions; its text is safe to show to the sender."""


class InvalidPayload(ProtocolError):
    """Bytes that are not a request: broken MessagePack, a refused array marker, or a limit exceeded."""


class ObservationError(ProtocolError):
    """A well-formed request whose content the policy cannot take; one sentence with field, value and remedy."""
