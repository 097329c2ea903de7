"""The errors of the stack. The text of each is one sentence for the person who reads it.

::

    PannierError
    ├── ConfigError      a setting is missing, unknown or not legal
    ├── ModelError       a model is missing, incomplete or can't be run
    ├── DeviceError      a device is missing or too small
    ├── NotAccepted      the gateway refuses this worker
    └── GatewayLost      the gateway has gone, and nothing works without it

A process that meets one ends with it. What is wrong with one request only is `pannier.scheduler.Rejected`.
"""


class PannierError(Exception):
    """Base of all: something that a person can understand and change."""


class ConfigError(PannierError):
    """Raised when a setting is missing, unknown or not legal; names field, value and what is legal."""


class ModelError(PannierError):
    """Raised when a model is missing, incomplete or can't be run."""


class DeviceError(PannierError):
    """Raised when a device is missing, or hasn't the memory that was asked for."""


class NotAccepted(PannierError):
    """Raised in a worker that the gateway refuses, with the gateway's reason."""


class GatewayLost(PannierError):
    """Raised in a worker when nothing has come from the gateway for too long."""
