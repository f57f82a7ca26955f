"""Keyed streams in numpy: encoding, the states of many sets, their serialisation, and their store."""

from bruno.streams.codec import SetRecord, decode, decode_evidence, encode, encode_evidence
from bruno.streams.judgements import Judgements
from bruno.streams.store import Mark, Store

__all__ = [
    "Judgements",
    "Mark",
    "SetRecord",
    "Store",
    "decode",
    "decode_evidence",
    "encode",
    "encode_evidence",
]
