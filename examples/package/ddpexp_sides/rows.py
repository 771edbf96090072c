from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpexp.loggers.append_file import AppendFile, truncate_file
from ddpexp.loggers.base import Logger


class Rows(Logger):
    def __init__(self, run_dir: Path, file: str) -> None:
        self.file = AppendFile(run_dir / file)

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.file.write(f"{step},{name},{value}\n".encode())

    def position(self) -> Mapping[str, Any]:
        self.file.flush()
        return {self.file.path.name: self.file.num_bytes}

    def truncate(self, position: Mapping[str, Any] | None, step: int) -> None:
        truncate_file(self.file.path, position, self.file.path.name, lines=True)

    def close(self) -> None:
        self.file.close()
