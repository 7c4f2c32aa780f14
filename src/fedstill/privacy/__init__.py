"""What happens to an upload on its way to the server. No accountant yet: nothing here is a privacy guarantee."""

from fedstill.privacy.noise import clip_and_noise

__all__ = ["clip_and_noise"]
