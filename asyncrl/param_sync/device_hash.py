"""Triton kernel that copies and hashes chunks of a GPU's memory, many at once.

The hash is that of `asyncrl.param_sync.content_hash`: xxh3_128 of each chunk. XXH3 adds up what it makes of 64-byte
stripes in eight 64-bit lanes, and scrambles the lanes after each block of 16 stripes. Within a block the order does not
matter, so a block is one tile of 128 words, and a program (one warp) goes through the blocks of one chunk. Lanes have
the shape [4, 2], pairs, because each word is also added to the lane beside its own.
"""

from __future__ import annotations

import functools
import struct

import torch
import triton
import triton.language as tl

from asyncrl.param_sync import content_hash

_SHORT = tl.constexpr(content_hash.SHORT_BYTES)
_PADDED = tl.constexpr(content_hash.PADDED_BYTES)
_PRIME32_1 = tl.constexpr(0x9E3779B1)
_PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
_PRIME64_2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
_ALL_ONES = tl.constexpr(0xFFFFFFFFFFFFFFFF)
_PRIME_AVALANCHE = tl.constexpr(0x165667919E3779F9)

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
#: initial lanes, from the primes of XXH32 and XXH64
_LANES = (
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)


def run(chunks: torch.Tensor, hashed: bool) -> torch.Tensor | None:
    """Copy and hash ``chunks``, int64 [n, 3] on the device: source, target (0: not copied) and at most `CHUNK_BYTES`
    bytes of each. Addresses must be multiples of 8. Returns the hashes, int64 [n, 2], high and low half of
    each, None if not ``hashed``. Does not wait."""
    hashes = chunks.new_empty(len(chunks), 2) if hashed else None
    constants = _constants(chunks.device)
    if len(chunks):
        into = chunks if hashes is None else hashes
        _copy_and_hash[(len(chunks),)](chunks, constants, into, hashed, num_warps=1)
    return hashes


@functools.cache
def _constants(device: torch.device) -> torch.Tensor:
    """int64 [56]: the secret as words; eight keys each for the last stripe and for the two halves of the result; the
    initial lanes."""
    offsets = [*range(0, 192, 8), *(start + 8 * i for start in (121, 11, 117) for i in range(8))]
    words = [struct.unpack_from("<q", _SECRET, offset)[0] for offset in offsets]
    words += struct.unpack("<8q", struct.pack("<8Q", *_LANES))
    return torch.tensor(words, dtype=torch.int64, device=device)


# fmt: off
@triton.jit
def _copy_and_hash(chunks, constants, hashes, HASH: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    source = tl.load(chunks + 3 * chunk)
    target = tl.load(chunks + 3 * chunk + 1)
    nbytes = tl.load(chunks + 3 * chunk + 2).to(tl.int32)
    words = nbytes // 8
    copied = tl.where(target != 0, nbytes, 0)
    copied_words = copied // 8
    read = source.to(tl.pointer_type(tl.uint64))
    write = target.to(tl.pointer_type(tl.uint64))
    read_byte = source.to(tl.pointer_type(tl.uint8))
    write_byte = target.to(tl.pointer_type(tl.uint8))

    byte = tl.arange(0, 8)
    at = words * 8 + byte
    rest = tl.load(read_byte + at, at < nbytes, 0)
    tl.store(write_byte + at, rest, at < copied)
    last_word = tl.sum(rest.to(tl.uint64) << (8 * byte).to(tl.uint64), 0)

    length = tl.where(nbytes <= _SHORT, _PADDED, nbytes)
    stripes = (length - 1) // 64  # without the last, which ends where the chunk ends
    blocks = stripes // 16  # complete ones, after which the lanes are scrambled
    lane = 2 * tl.arange(0, 4)[:, None] + tl.arange(0, 2)[None]
    word = tl.arange(0, 128)  # of a block
    hashed_words = 8 * stripes
    keys = tl.load(constants + word // 8 + word % 8).to(tl.uint64)
    scramble_keys = tl.load(constants + 16 + lane).to(tl.uint64)
    lanes = tl.load(constants + 48 + lane).to(tl.uint64)
    complete = blocks // 4 * 4
    for block in range(0, complete, 4):
        lanes = _four_blocks(
            lanes, read, write, 128 * block + word, words, copied_words, hashed_words, last_word, keys, scramble_keys,
            block, blocks, HASH, False,
        )
    lanes = _four_blocks(
        lanes, read, write, 128 * complete + word, words, copied_words, hashed_words, last_word, keys, scramble_keys,
        complete, blocks, HASH, True,
    )
    if HASH:
        at = length - 64 + 8 * lane[:, :, None] + byte[None, None]  # of any alignment, so byte by byte
        last = tl.load(read_byte + at, at < nbytes, 0).to(tl.uint64) << (8 * byte[None, None]).to(tl.uint64)
        last = tl.sum(last, 2)
        last_keys = tl.load(constants + 24 + lane).to(tl.uint64)
        lanes += _products(last, last_keys) + _neighbours(last)
        low_keys = tl.load(constants + 32 + lane).to(tl.uint64)
        high_keys = tl.load(constants + 40 + lane).to(tl.uint64)
        size = length.to(tl.uint64)
        tl.store(hashes + 2 * chunk, _merged(lanes, high_keys, (size * _PRIME64_2) ^ _ALL_ONES).to(tl.int64))
        tl.store(hashes + 2 * chunk + 1, _merged(lanes, low_keys, size * _PRIME64_1).to(tl.int64))


@triton.jit
def _four_blocks(
    lanes, read, write, at, words, copied_words, hashed_words, last_word, keys, scramble_keys,
    block, blocks, HASH: tl.constexpr, MASKED: tl.constexpr,
):
    """Copy four blocks from word ``at`` on, and return the lanes after them. ``MASKED``: the chunk may end there."""
    # All are read before the first is written: a store that may overlap a load holds it up.
    words0 = _words(read, at, words, MASKED)
    words1 = _words(read, at + 128, words, MASKED)
    words2 = _words(read, at + 256, words, MASKED)
    words3 = _words(read, at + 384, words, MASKED)
    if copied_words > 0:
        if MASKED:
            tl.store(write + at, words0, at < words)
            tl.store(write + at + 128, words1, at + 128 < words)
            tl.store(write + at + 256, words2, at + 256 < words)
            tl.store(write + at + 384, words3, at + 384 < words)
        else:
            tl.store(write + at, words0)
            tl.store(write + at + 128, words1)
            tl.store(write + at + 256, words2)
            tl.store(write + at + 384, words3)
    if HASH:
        if MASKED:
            words0 = tl.where(at == words, last_word, words0)  # of a short chunk, which the first block holds
        lanes = _block(lanes, words0, at, hashed_words, keys, scramble_keys, block < blocks, MASKED)
        lanes = _block(lanes, words1, at + 128, hashed_words, keys, scramble_keys, block + 1 < blocks, MASKED)
        lanes = _block(lanes, words2, at + 256, hashed_words, keys, scramble_keys, block + 2 < blocks, MASKED)
        lanes = _block(lanes, words3, at + 384, hashed_words, keys, scramble_keys, block + 3 < blocks, MASKED)
    return lanes


@triton.jit
def _words(read, at, words, MASKED: tl.constexpr):
    return tl.load(read + at, at < words, 0) if MASKED else tl.load(read + at)


@triton.jit
def _block(lanes, words, at, hashed_words, keys, scramble_keys, complete, MASKED: tl.constexpr):
    """The lanes after a block, which are scrambled if it is ``complete``."""
    products = _products(words, keys)
    if MASKED:
        products = tl.where(at < hashed_words, products, 0)
        words = tl.where(at < hashed_words, words, 0)
    lanes += tl.sum(tl.reshape(products, (16, 4, 2)), 0) + _neighbours(tl.sum(tl.reshape(words, (16, 4, 2)), 0))
    scrambled = (lanes ^ (lanes >> 47) ^ scramble_keys) * _PRIME32_1
    if MASKED:
        scrambled = tl.where(complete, scrambled, lanes)
    return scrambled


@triton.jit
def _products(words, keys):
    """Of the halves of each word."""
    mixed = words ^ keys
    return (mixed & 0xFFFFFFFF) * (mixed >> 32)


@triton.jit
def _neighbours(lanes):
    """For each lane the other one of its pair, [4, 2]: the pair's sum without it."""
    return tl.sum(lanes, 1)[:, None] - lanes


@triton.jit
def _merged(lanes, keys, start):
    """Half of a result: the 128-bit products of the pairs, folded, added up and mixed."""
    mixed = lanes ^ keys
    first = tl.arange(0, 2)[None] == 0
    left = tl.sum(tl.where(first, mixed, 0), 1)
    right = tl.sum(tl.where(first, 0, mixed), 1)
    total = start + tl.sum((left * right) ^ tl.umulhi(left, right), 0)
    total = (total ^ (total >> 37)) * _PRIME_AVALANCHE
    return total ^ (total >> 32)
# fmt: on
