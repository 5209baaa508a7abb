"""The pretend device: a PrivateUse1 backend named `vgpu`, with streams that order nothing but have an identity.

Known limitations: one device; events answer at once; random states are constant.
"""

import types
from typing import Any, Self

import torch
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

DEVICE_TYPE = "vgpu"


class Event:
    """An event that has always happened."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Take what `torch.cuda.Event` takes."""

    def record(self, *_args: object) -> None:
        """Nothing to wait for."""

    def wait(self, *_args: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, _other: Self) -> float:
        """Milliseconds: no time passes here, but nobody may divide by nothing."""
        return 1.0


class Stream:
    """A stream has a number, because the caching allocator keeps pools for each stream.

    One object stands for one stream: `current_stream()` must return the same one each time, or DeepSpeed's
    reductions get a pool of their own that they do not have on CUDA.
    """

    _num_made = 0
    current: "Stream"
    default: "Stream"

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self.number = Stream._num_made
        Stream._num_made += 1

    def wait_stream(self, _stream: Self) -> None:
        """Nothing to wait for."""

    def wait_event(self, _event: Event) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """The event given, or a fresh one."""
        return event or Event()

    def query(self) -> bool:
        """It is idle."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        """Nothing to restore: `use_stream` does that."""


Stream.current = Stream.default = Stream()
AnyStream = Stream
"""The type, for classes that have an attribute `Stream`."""


class use_stream:  # noqa: N801 - a context manager, named like torch.cuda.stream
    """What `torch.cuda.stream` does: allocations inside come from that stream's pools."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._before = Stream.current

    def __enter__(self) -> None:
        self._before = Stream.current
        if self._stream is not None:
            Stream.current = self._stream

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: types.TracebackType | None
    ) -> None:
        Stream.current = self._before


class DeviceModule(_DummyBackendModule):
    """`torch.vgpu`: what torch asks a backend."""

    Stream, Event = Stream, Event

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast accepts."""
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, *_args: object) -> torch.Tensor:
        """A state that checkpointing can save and restore; it lives on the host."""
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, *_args: object) -> None:
        """Nothing is random here."""

    def current_stream(self, *_args: object) -> AnyStream:
        """The stream that allocations go to."""
        return Stream.current

    def default_stream(self, *_args: object) -> AnyStream:
        """Stream 0."""
        return Stream.default

    def synchronize(self, *_args: object) -> None:
        """Nothing to wait for."""

    def set_device(self, *_args: object) -> None:
        """There is one."""

    def empty_cache(self) -> None:
        """Only DeepSpeed's accelerator reaches the tape."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        msg = f"the virtual GPU has no torch.{DEVICE_TYPE}.{name}"
        raise AttributeError(msg)


def register() -> None:
    """Make `torch.device("vgpu")` exist. Once a process."""
    if not hasattr(torch, DEVICE_TYPE):
        _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=DeviceModule())
