"""What a compute worker pretends: a device that takes its time, links that are slow."""

from dataclasses import dataclass

from pannier.compute.emulated_device import EmulatedDevice, EmulatedModel, StepTime
from pannier.compute.emulated_link import EmulatedLink
from pannier.compute.link import Link
from pannier.runtime.config import ComputeConfig
from pannier.slicer import SlicedModel


@dataclass(frozen=True)
class Emulation:
    """Nothing, unless something is said."""

    step_time: StepTime | None = None
    delay_ms: float = 0.0
    """Each way."""
    gigabits: float | None = None
    """Per second, each way."""

    @classmethod
    def of(cls, config: ComputeConfig) -> "Emulation":
        """What is configured."""
        step_time = None if config.emulate_compute is None else StepTime(*config.emulate_compute)
        return cls(step_time, config.emulate_delay, config.emulate_bandwidth)

    def device(self, model: SlicedModel) -> tuple[SlicedModel, EmulatedDevice | None]:
        """The model as it is run, and the device that would run it if that is emulated."""
        if self.step_time is None:
            return model, None
        return EmulatedModel(model), EmulatedDevice(self.step_time, len(model.calls) + 1)

    def link(self, link: Link) -> Link:
        """The link, slow if it is to be."""
        if not self.delay_ms and self.gigabits is None:
            return link
        return EmulatedLink(link, self.delay_ms, self.gigabits)

    def __str__(self) -> str:
        return "" if self.step_time is None else f"{self.step_time}, results mean nothing"
