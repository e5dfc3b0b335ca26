"""Live weights of an engine in this process, into which buckets are written directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.param_sync import device_ranges
from asyncrl.param_sync.buckets import Bucket, TensorPart, check_checksum, host_bytes
from asyncrl.param_sync.digest import dtype_name, flat_bytes
from asyncrl.param_sync.errors import BucketKey, SyncError
from asyncrl.param_sync.manifest import DTYPE_BYTES, Manifest, ManifestError
from asyncrl.types.versions import PolicyVersion

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of the same size, to copy bytes


class LiveWeights:
    """Named tensors that a session overwrites.

    Called in this order, from one thread: ``open`` once, ``take`` per bucket, ``verify``, ``commit``; ``abort`` at any
    point instead. ``open`` runs during generation and writes nothing; ``take`` and ``destination`` run under pause.

    ``views``: the live tensors by safetensors name; a view may be strided, or a slice of a fused parameter. ``tied``
    maps further names to the view whose storage they share. ``on_commit`` gets the new version, last. ::

        weights = LiveWeights({"model.embed_tokens.weight": w}, {"lm_head.weight": "model.embed_tokens.weight"},
                              on_commit=set_version)

    It keeps no copy of the weights and no view into a bucket. So from the first byte written until the commit the
    weights match no version, and `intact` is False.
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
            raise ValueError(
                f"expected for each tied name a view under another name, found none for {_some(both | lost)}"
            )
        self._flat = {name: flat_bytes(view) for name, view in self._views.items() if view.is_contiguous()}
        self._writers = {name: _writer(view) for name, view in self._views.items()}
        devices = {view.device for view in self._views.values()}
        self._device = devices.pop() if len(devices) == 1 else torch.device("cpu")  # where buckets are unpacked
        device_ranges.works_on(self._device)  # compiles here, not while generation is paused
        self._session: str | None = None
        self._agreed: Manifest | None = None  # the last one, without clashes
        self._sizes: dict[str, tuple[int, int]] = {}  # expected tensors: nbytes, and bytes per element
        self._received: dict[str, int] = {}  # bytes so far, by tensor
        self._next: dict[int, int] = {}  # sender → sequence of its next bucket
        self._verified = False
        self._intact = True

    @property
    def needs_base(self) -> bool:
        """Always True: a manifest must send everything."""
        return True

    def open(self, session: str, manifest: Manifest) -> None:
        """Check every name, shape and dtype against the live tensors. Raises ManifestError naming both sides."""
        if manifest != self._agreed:
            self._agree(manifest)
        self._session, self._verified = session, False
        self._received, self._next = {}, {}

    def _agree(self, manifest: Manifest) -> None:
        if problems := self._clashes(manifest):
            more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
            raise ManifestError(
                f"sender and replica do not hold the same tensors, {len(problems)} differ: "
                f"{'; '.join(problems[:4])}{more}. Both sides must build the model from the same checkpoint"
            )
        self._agreed = manifest
        self._sizes = {t.name: (t.nbytes, DTYPE_BYTES[t.dtype]) for t in manifest.sent()}

    def destination(self, session: str, part: TensorPart, device: torch.device) -> torch.Tensor | None:
        """Live memory for a part, uint8 [nbytes] on ``device``, into which it may be received from now on, so `intact`
        becomes False. None if the tensor is not contiguous on ``device``. `check` decides which parts are expected."""
        flat, end = self._flat.get(part.name), part.start + part.nbytes
        if session != self._session or part.name not in self._sizes or flat is None or flat.device != device:
            return None
        if not 0 <= part.start <= end <= len(flat):
            return None
        self._intact = self._verified = False
        return flat[part.start : end]

    def take(self, bucket: Bucket) -> None:
        """Check the bucket, then write it. Raises as `check`."""
        self.check(bucket)
        self.write(bucket)

    def check(self, bucket: Bucket) -> None:
        """Register the bucket without writing it. Raises SyncError for a bucket of another session, out of sequence,
        with a wrong checksum, or with bytes that are not expected next."""
        key = BucketKey(bucket.session, bucket.sender, bucket.sequence)
        expected = self._next.get(bucket.sender, 0)
        if bucket.session != self._session:
            raise _refused(key, f"this receiver is in session {self._session}")
        if bucket.sequence != expected:
            raise _refused(key, f"out of sequence, bucket {expected} of this sender comes next")
        capacity = len(bucket.data)
        for part in bucket.parts:
            self._expect(key, part, capacity, part.name in bucket.in_place)
        check_checksum(bucket)
        self._verified = False
        self._next[bucket.sender] = expected + 1

    def write(self, bucket: Bucket) -> None:
        """Write the parts of a checked bucket that are not in place yet."""
        self._intact = False
        data: Any
        if self._device.type == "cpu":
            data = host_bytes(bucket)
        elif isinstance(bucket.data, torch.Tensor):
            data = bucket.data.to(self._device)  # usually there already
        else:
            data = _on_device(host_bytes(bucket), self._device)  # in one copy, not part by part
        parts = [part for part in bucket.parts if part.name not in bucket.in_place]
        if isinstance(data, torch.Tensor) and device_ranges.works_on(data.device):
            parts = self._write_at_once(parts, data)
        for part in parts:
            self._writers[part.name](part.start, data[part.offset : part.offset + part.nbytes])

    def _write_at_once(self, parts: Sequence[TensorPart], data: torch.Tensor) -> list[TensorPart]:
        """Write the parts of contiguous tensors on a device; returns the others."""
        ranges, others, begin = [], [], data.data_ptr()
        for part in parts:
            name, start, nbytes, offset = part
            source, target = begin + offset, self._flat[name].data_ptr() + start if name in self._flat else None
            if target is None or (source | target) % device_ranges.ALIGN_BYTES:
                others.append(part)
            else:
                ranges.append((source, nbytes, target))
        device_ranges.copy(ranges, data.device)
        return others

    def verify(self) -> None:
        """Raises SyncError unless every byte of every sent tensor has arrived; `take` ensures that none arrived
        twice."""
        if self._session is None:
            raise SyncError("verify", None, None, None, "no session is open")
        short = [
            f"{name}: {self._received.get(name, 0)} of {nbytes} bytes"
            for name, (nbytes, _) in self._sizes.items()
            if self._received.get(name, -1) != nbytes
        ]
        if short:
            raise SyncError("verify", None, None, None, f"{len(short)} tensors are incomplete: {_some(short)}")
        self._verified = True

    def commit(self, version: PolicyVersion) -> None:
        """Declare the new weights to be those of ``version``. Raises SyncError if nothing was verified."""
        if not self._verified:
            raise SyncError("commit", None, version, None, "nothing verified to commit; verify comes first")
        self._session, self._verified, self._intact = None, False, True
        self._on_commit(version)

    def abort(self) -> None:
        """Forget the session; `intact` then shows whether the weights survived it."""
        self._session, self._verified = None, False

    def intact(self) -> bool:
        """True if the weights are those of a single version."""
        return self._intact

    def _expect(self, key: BucketKey, part: TensorPart, capacity: int, in_place: bool) -> None:
        """Register a part; raises SyncError unless it is the next one of its tensor."""
        name, start, count, offset = part
        if name not in self._sizes:
            raise _refused(key, f"{name} is not a tensor that the manifest sends")
        nbytes, itemsize = self._sizes[name]
        at, end = self._received.get(name, 0), start + count
        again = start < at or (at == nbytes and name in self._received)
        if again or start != at:
            what = "arrived a second time" if again else "came early"
            raise _refused(key, f"{name}: byte {start} {what}, {at} of {nbytes} bytes have arrived")
        outside = not 0 <= offset <= offset + count <= capacity
        if start % itemsize or end % itemsize or not start <= end <= nbytes or (outside and not in_place):
            raise _refused(key, f"{part} does not fit {name} ({nbytes} bytes) or a bucket of {capacity}")
        self._received[name] = end

    def _clashes(self, manifest: Manifest) -> list[str]:
        """Differences between the manifest and the live tensors, one line each."""
        problems = []
        known = {t.name for t in manifest}
        for spec in manifest:
            if spec.tied_to is not None:
                # A tied name needs no data if it is unknown here, or tied to the same tensor.
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


#: (start, bytes): writes uint8 [n], a NumPy array or on a device a torch tensor, to a tensor from byte ``start`` on
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
            source = _on_device(source, view.device)
        with torch.inference_mode():  # to write to inference tensors
            write_range(target, start // itemsize, source.view(integer))

    return write


def _on_device(source: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy the bytes to the device. The extra copy is for torch, which refuses read-only memory."""
    return torch.from_numpy(source.copy()).to(device)


def write_range(view: Any, start: int, source: Any) -> None:
    """Write ``source`` [n] over the elements start … start + n of ``view`` in row-major order. ``view`` (NumPy or
    torch, at least one dimension) may be strided: whole rows are written at once, partial rows one level down."""
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
