"""A sender of weights over gloo and its readers, each a process that `tests.torture.machines.Machines` runs somewhere.

python -m tests.support.over_cables send HOST MIB NAME …     prints its address; sends once it reads a line
python -m tests.support.over_cables read NAME ADDRESS        prints the bytes that it has received
"""

import json
import sys
from dataclasses import asdict

import torch

from asyncrl.param_sync.buckets import pack
from asyncrl.param_sync.transports.collective import CollectiveAddress
from asyncrl.param_sync.transports.gloo import TRANSPORT

LIMIT_S = 60.0
BUCKET_BYTES = 4 << 20


def send(host: str, mib: str, *names: str) -> None:
    writer = TRANSPORT.writer(0, BUCKET_BYTES, host)
    print(json.dumps(asdict(writer.address)), flush=True)
    sys.stdin.readline()
    writer.open("session", names, LIMIT_S, LIMIT_S)
    tensors = ((f"t{i}", torch.full((1 << 20,), i % 256, dtype=torch.uint8)) for i in range(int(mib)))
    for filled in pack(tensors, writer.buffer, True, lambda *_: None, writer.zero_copy_from):
        writer.publish(filled)
    writer.finish()
    assert not writer.dropped, writer.dropped
    writer.close()


def read(name: str, address: str) -> None:
    reader = TRANSPORT.reader(name)
    reader.connect("session", [CollectiveAddress(**json.loads(address))], LIMIT_S)
    print("connected", flush=True)
    print(sum(part.nbytes for bucket in reader.buckets(LIMIT_S) for part in bucket.parts))
    reader.close()


if __name__ == "__main__":
    {"send": send, "read": read}[sys.argv[1]](*sys.argv[2:])
