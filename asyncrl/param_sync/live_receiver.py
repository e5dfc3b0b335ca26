"""The receiver that writes arriving buckets straight into an engine's live weights (staging ``bucket``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from asyncrl.param_sync.buckets import check_checksum, host_bytes
from asyncrl.param_sync.digest import dtype_name, flat_bytes
from asyncrl.param_sync.errors import BucketKey, SyncError
from asyncrl.param_sync.manifest import DTYPE_BYTES, Manifest, ManifestError
from asyncrl.param_sync.receiver import Bucket, TensorPart
from asyncrl.sample import PolicyVersion

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # same-sized stand-ins: bytes are bytes


class LiveViewReceiver:
    """Implements `asyncrl.param_sync.receiver.Receiver`.

    ``views`` are the live tensors by their safetensors names; a view may be strided, or a slice of a fused parameter.
    ``tied`` maps further names to the view whose storage they share. ``on_commit`` is told the new version, last. ::

        receiver = LiveViewReceiver({"model.embed_tokens.weight": w}, {"lm_head.weight": "model.embed_tokens.weight"},
                                    on_commit=set_version)

    Nothing is held beside the live weights: no copy, and no view into a bucket. So from the first byte taken until
    the commit the weights are of no version, which `intact` says.
    """

    def __init__(
        self,
        views: Mapping[str, torch.Tensor],
        tied: Mapping[str, str],
        on_commit: Callable[[PolicyVersion], None],
    ) -> None:
        self._views, self._tied, self._on_commit = dict(views), dict(tied), on_commit
        both = self._views.keys() & self._tied.keys()
        lost = self._tied.values() - self._views.keys()
        if both or lost:
            raise ValueError(f"tied names need a view under another name: {_some(both | lost)}")
        self._flat = {name: flat_bytes(view) for name, view in self._views.items() if view.is_contiguous()}
        self._writers = {name: _writer(view) for name, view in self._views.items()}
        devices = {view.device for view in self._views.values()}
        self._device = devices.pop() if len(devices) == 1 else torch.device("cpu")  # where buckets are taken apart
        self._session: str | None = None
        self._sizes: dict[str, tuple[int, int]] = {}  # of each tensor to come: its bytes, and those of an element
        self._received: dict[str, int] = {}  # bytes of each tensor that has begun to arrive
        self._next: dict[int, int] = {}  # sender → sequence of its next bucket
        self._verified = False
        self._intact = True

    @property
    def needs_base(self) -> bool:
        return True

    def open(self, session: str, manifest: Manifest) -> None:
        problems = list(self._clashes(manifest))
        if problems:
            more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
            raise ManifestError(
                f"sender and replica do not hold the same tensors, {len(problems)} differ: "
                f"{'; '.join(problems[:4])}{more}. Both sides must build the model from the same checkpoint"
            )
        self._session, self._verified = session, False
        self._sizes = {t.name: (t.nbytes, DTYPE_BYTES[t.dtype]) for t in manifest.sent()}
        self._received, self._next = {}, {}

    def place(self, session: str, part: TensorPart, device: torch.device) -> torch.Tensor | None:
        """Live memory of a part of any tensor that is contiguous there. Which parts may come is for `check` to say."""
        flat, end = self._flat.get(part.name), part.start + part.nbytes
        if session != self._session or part.name not in self._sizes or flat is None or flat.device != device:
            return None
        if not 0 <= part.start <= end <= len(flat):
            return None
        self._intact = self._verified = False
        return flat[part.start : end]

    def take(self, bucket: Bucket) -> None:
        """Check the whole bucket, then write it. Raises what `check` does."""
        self.check(bucket)
        self.write(bucket)

    def check(self, bucket: Bucket) -> None:
        """Count the bucket in and write nothing. Raises SyncError for a bucket of another session, out of sequence,
        with a wrong checksum, or with bytes that were not expected next."""
        key = BucketKey(bucket.session, bucket.sender, bucket.sequence)
        expected = self._next.get(bucket.sender, 0)
        if bucket.session != self._session:
            raise _refused(key, f"this receiver takes part in session {self._session}")
        if bucket.sequence != expected:
            raise _refused(key, f"out of sequence, bucket {expected} of this sender comes next")
        for part in bucket.parts:
            self._expect(key, part, len(bucket.data), part.name in bucket.placed)
        check_checksum(bucket)
        self._verified = False
        self._next[bucket.sender] = expected + 1

    def write(self, bucket: Bucket) -> None:
        """Write what is not there yet of a bucket that `check` has let in."""
        self._intact = False
        data: Any
        if self._device.type == "cpu":
            data = host_bytes(bucket)
        elif isinstance(bucket.data, torch.Tensor):
            data = bucket.data.to(self._device)  # where it is already, as a rule
        else:
            data = _uploaded(host_bytes(bucket), self._device)  # at once, not part by part
        for part in bucket.parts:
            if part.name in bucket.placed:
                continue
            self._writers[part.name](part.start, data[part.offset : part.offset + part.nbytes])

    def verify(self) -> None:
        """Raises SyncError unless every byte of every sent tensor has arrived (once: `take` sees to that)."""
        if self._session is None:
            raise SyncError("verify", None, None, None, "no session is open")
        short = [
            f"{name}: {self._received.get(name, 0)} of {nbytes} bytes"
            for name, (nbytes, _) in self._sizes.items()
            if self._received.get(name, -1) != nbytes
        ]
        if short:
            raise SyncError("verify", None, None, None, f"{len(short)} tensors are not whole: {_some(short)}")
        self._verified = True

    def commit(self, version: PolicyVersion) -> None:
        if not self._verified:
            raise SyncError("commit", None, version, None, "nothing verified to commit; verify comes first")
        self._session, self._verified, self._intact = None, False, True
        self._on_commit(version)

    def abort(self) -> None:
        self._session, self._verified = None, False

    def intact(self) -> bool:
        return self._intact

    def _expect(self, key: BucketKey, part: TensorPart, capacity: int, placed: bool) -> None:
        """Count a part in, if it is the next one of its tensor."""
        name, start, count, offset = part
        if name not in self._sizes:
            raise _refused(key, f"{name} is not a tensor that the manifest sends")
        nbytes, itemsize = self._sizes[name]
        at, end = self._received.get(name, 0), start + count
        again = start < at or (at == nbytes and name in self._received)
        if again or start != at:
            what = "arrived a second time" if again else "came early"
            raise _refused(key, f"{name}: byte {start} {what}, {at} of {nbytes} bytes are here")
        if start % itemsize or end % itemsize or end > nbytes or (offset + count > capacity and not placed):
            raise _refused(key, f"{part} does not fit {name} ({nbytes} bytes) or a bucket of {capacity}")
        self._received[name] = end

    def _clashes(self, manifest: Manifest) -> list[str]:
        """Where the manifest and the live tensors differ, one line each."""
        problems = []
        known = {t.name for t in manifest}
        for spec in manifest:
            if spec.tied_to is not None:
                # A tied name nobody holds here is no loss, and a name tied here to the same tensor comes with it.
                if spec.name in self._views or self._tied.get(spec.name, spec.tied_to) != spec.tied_to:
                    here = self._tied.get(spec.name, "storage of its own")
                    problems.append(f"{spec.name}: the sender ties it to {spec.tied_to}, the replica to {here}")
            elif spec.name in self._tied:
                problems.append(f"{spec.name}: sent, but the replica ties it to {self._tied[spec.name]}")
            elif spec.name not in self._views:
                problems.append(f"{spec.name}: sent, but unknown to the replica")
            else:
                view = self._views[spec.name]
                sent, held = f"{spec.dtype}{list(spec.shape)}", f"{dtype_name(view)}{list(view.shape)}"
                if sent != held:
                    problems.append(f"{spec.name}: sent as {sent}, the replica holds {held}")
        problems += [f"{name}: a parameter of the replica that is not sent" for name in self._views.keys() - known]
        return problems


#: writes bytes (uint8 [n], NumPy's or, for a view on a device, torch's) to a tensor from its byte ``start`` on
_Writer = Callable[[int, Any], None]


def _writer(view: torch.Tensor) -> _Writer:
    view = view.detach()
    if view.device.type == "cpu" and view.is_contiguous():
        flat = flat_bytes(view).numpy()

        def copy(start: int, source: np.ndarray) -> None:
            flat[start : start + len(source)] = source

        return copy

    itemsize, integer = view.element_size(), _INTEGERS[view.element_size()]
    target = view.view(integer).view(-1) if view.is_contiguous() else view.view(integer)
    if view.device.type == "cpu":
        array = target.numpy()
        return lambda start, source: write_range(array, start // itemsize, source.view(array.dtype))

    def write(start: int, source: np.ndarray | torch.Tensor) -> None:
        if isinstance(source, np.ndarray):
            source = _uploaded(source, view.device)
        with torch.inference_mode():  # inference tensors may be written too
            write_range(target, start // itemsize, source.view(integer))

    return write


def _uploaded(source: np.ndarray, device: torch.device) -> torch.Tensor:
    """The bytes on the device. torch takes no read-only memory, so they are copied once more on the way."""
    return torch.from_numpy(source.copy()).to(device)


def write_range(view: Any, start: int, source: Any) -> None:
    """Write ``source`` [n] over the elements start … start + n of ``view``, counted in row-major order, where ``view``
    (NumPy or torch, one dimension or more) may be strided: whole rows at once, cut rows one level down."""
    if view.ndim == 1:
        view[start : start + len(source)] = source
        return
    row = int(np.prod(view.shape[1:], dtype=np.int64))
    while len(source):
        i, within = divmod(start, row)
        if within or len(source) < row:
            count = min(row - within, len(source))
            write_range(view[i], within, source[:count])
        else:
            rows = len(source) // row
            count = rows * row
            view[i : i + rows] = source[:count].reshape(rows, *view.shape[1:])
        start, source = start + count, source[count:]


def _refused(key: BucketKey, message: str) -> SyncError:
    return SyncError("transfer", None, None, key, message)


def _some(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
