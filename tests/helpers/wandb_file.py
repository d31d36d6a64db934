"""The file that Weights & Biases writes in its offline mode."""

import json
import struct
from pathlib import Path


def history(path: Path) -> list[dict]:
    """The logged rows. The file is 7 bytes and then a log of LevelDB: blocks of 32 KiB, which may split a record."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, content, rows = path.read_bytes(), 7, b"", []
    while place < len(data):
        left = -place % 32768  # of the block
        if 0 < left < 7:  # no room for a head
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        content += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the end of one
            record, content = Record.FromString(content), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return rows
