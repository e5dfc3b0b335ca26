"""A transport through files: `param_sync.transport=docs.examples.toy_transport:TRANSPORT`.

Every writer owns a folder, with a subfolder "SESSION READER" for each reader that has joined. The writer puts one
bucket at a time there; the reader deletes it after reading. Either side leaves by deleting the reader's folder.
"""

import pickle
import shutil
import tempfile
import time
from pathlib import Path

import torch

from asyncrl.param_sync.buckets import Bucket, aligned_capacity
from asyncrl.param_sync.errors import BucketKey, SyncError
from asyncrl.param_sync.transports.base import NoReaders, Transport
from asyncrl.param_sync.transports.placement import share_a_machine

POLL_S = 0.001


class FolderTransport(Transport):
    def unfit(self, senders, replicas):
        return None if share_a_machine([*senders, *replicas]) else "needs all senders and replicas on one machine"

    def writer(self, sender, bucket_bytes, host):
        return FolderWriter(sender, bucket_bytes)

    def reader(self, replica):
        return FolderReader(replica)


TRANSPORT = FolderTransport()


def folder_of(root, session, reader):
    return Path(root, f"{session} {reader}".replace("/", "-"))


class FolderWriter:
    zero_copy_from = ceiling = None

    def __init__(self, sender, bucket_bytes):
        self._buffer = torch.zeros(aligned_capacity(bucket_bytes), dtype=torch.uint8)
        self.address = sender, tempfile.mkdtemp(prefix="asyncrl-")  # readable by this user only
        self.dropped, self._aborted = {}, None

    def open(self, session, readers, deadline_s, stall_s, keep=False):
        self._session, self._stall_s, self._deadline = session, stall_s, time.monotonic() + deadline_s
        self.dropped, self._readers = {}, {who: folder_of(self.address[1], session, who) for who in readers}
        self._wait(lambda reader: reader.is_dir(), "did not join")
        for uninvited in {*Path(self.address[1]).iterdir()} - {*self._readers.values()}:
            shutil.rmtree(uninvited, ignore_errors=True)

    def buffer(self):
        return self._buffer

    def publish(self, filled):
        self._put("bucket", pickle.dumps((filled.parts, filled.checksum, self._buffer.numpy().tobytes())))

    def finish(self):
        self._put("end", b"")

    def abort(self, session):
        self._aborted = session

    def close(self):
        shutil.rmtree(self.address[1], ignore_errors=True)

    def _put(self, name, data):
        self._wait(lambda reader: not (reader / "bucket").exists(), "was silent")
        for who, reader in list(self._readers.items()):
            try:
                (reader / "new").write_bytes(data)
                (reader / "new").rename(reader / name)
            except FileNotFoundError:
                self._drop(who, "went away")

    def _wait(self, done, late):
        limit = min(time.monotonic() + self._stall_s, self._deadline)
        while waiting := [who for who, reader in self._readers.items() if not done(reader)]:
            if time.monotonic() > limit or self._aborted == self._session:
                break
            time.sleep(POLL_S)
        if self._aborted == self._session:
            waiting, late = list(self._readers), "the session was aborted"
        for who in waiting:
            self._drop(who, late)
        if not self._readers:
            raise NoReaders

    def _drop(self, who, why):
        shutil.rmtree(self._readers.pop(who), ignore_errors=True)
        self.dropped[who] = why


class FolderReader:
    def __init__(self, replica):
        self._replica, self._folders = replica, {}

    def connect(self, session, addresses, deadline_s):
        self.abort()
        self._session = session
        self._folders = {sender: folder_of(root, session, self._replica) for sender, root in addresses}
        for sender, folder in self._folders.items():
            if not folder.parent.is_dir():
                raise SyncError("plan", self._replica, None, None, f"sender {sender} is gone, and its folder with it")
            folder.mkdir()

    def buckets(self, deadline_s, destination=None):
        limit, next_bucket = time.monotonic() + deadline_s, dict.fromkeys(self._folders, 0)
        try:
            while next_bucket:
                for sender, sequence in list(next_bucket.items()):
                    folder, key = self._folders[sender], BucketKey(self._session, sender, sequence)
                    if (folder / "bucket").exists():
                        parts, checksum, data = pickle.loads((folder / "bucket").read_bytes())
                        yield Bucket(*key, parts, memoryview(data), checksum)
                        (folder / "bucket").unlink(missing_ok=True)
                        next_bucket[sender] += 1
                    elif (folder / "end").exists():
                        del next_bucket[sender]
                    elif not folder.is_dir() or time.monotonic() > limit:
                        problem = "was not done by the deadline" if folder.is_dir() else "went away"
                        raise SyncError("transfer", self._replica, None, key, f"sender {sender} {problem}")
                time.sleep(POLL_S)
        finally:
            self.abort()

    def abort(self):
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)

    close = abort
