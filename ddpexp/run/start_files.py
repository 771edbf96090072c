"""The configuration and manifest that a start writes into its run directory; a refused start undoes that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ddpexp.config import facts
from ddpexp.config.resolve import text_with_facts
from ddpexp.run import directory, manifest
from ddpexp.run.directory import RunDir
from ddpexp.run.prepare import used_facts
from ddpexp.run.resume import PreviousRun
from ddpexp.run.stored_config import checked_text
from ddpexp.settings.data import Data
from ddpexp.system import files
from ddpexp.system.secrets import held_in, referenced
from ddpexp.system.terminal import print_message


class StartFiles:
    """The files that one start writes."""

    def __init__(self, text: str, overrides: Sequence[str]) -> None:
        """Take the configuration as YAML, and the overrides it was composed from. Writes nothing yet."""
        self.text, self._overrides = text, referenced(overrides)[0]
        self.facts: dict[str, Any] = {}  # of the data, which the configuration refers to
        self._before: dict[Path, bytes] = {}  # files of a resumed run, before this start changed them
        self._added: list[Path] = []  # files that this start has added to a resumed run

    def resolve_facts(self, data: Data, prepared: Mapping[str, Any] | None) -> None:
        """Put the facts of the prepared data in place of the configuration's references to them.

        Raises:
            RefusedError: a fact that is not there.
        """
        self.facts = used_facts(self.text, data, prepared)
        self.text = text_with_facts(self.text, self.facts)

    def config_text(self, run: RunDir, previous: PreviousRun | None) -> str:
        """Return the text of config.yaml: this command's, or the existing one if it means the same."""
        if previous is not None and not previous.replaces and run.config.exists() and run.overrides.exists():
            text = run.config.read_text()
            # A submission has written references to facts; what is secret by now may not have been one then.
            return self.text if facts.refers(text) or held_in(text) else text
        return self.text

    def write(
        self,
        run: RunDir,
        previous: PreviousRun | None,
        contents: Mapping[str, Any] | None,
        extra_files: Mapping[Path, bytes] = MappingProxyType({}),
    ) -> None:
        """Write this command's configuration and manifest.

        An existing manifest is replaced before config.yaml and records its new hash: a start that is killed in between
        must not look like a manual edit. `contents` are those of the manifest, `extra_files` are files it refers
        to.
        """
        has_manifest = previous is not None and previous.manifest is not None
        if previous is not None:
            self._before = {
                path: path.read_bytes()
                for path in (run.config, run.overrides, run.manifest, run.result)
                if path.is_file()
            }
            directory.reopen(run)
            if has_manifest:
                lengths = [f"{one.key}={one.new}" for one in previous.changes if one.is_length]
                up_to = f", up to {' '.join(lengths)} in all" if lengths else ""
                print_message(f"ddpexp: resuming {files.relative(run.path)}{up_to}")
        text, before = self.config_text(run, previous), self._before.get(run.config)
        text_before = before.decode() if before is not None else None
        config = checked_text(text)
        manifest_text = None
        if contents is not None:
            manifest_text = files.dumps({**contents, "config": manifest.accepted(config, text_before)})
        for path, content in extra_files.items():
            self._added.append(path)
            files.write_data(path, content)
        if manifest_text is not None and has_manifest:
            files.write(run.manifest, manifest_text)
        if text != text_before or run.overrides not in self._before:
            self._added += [copy for copy in map(files.back_up, (run.config, run.overrides)) if copy]
            files.write(run.config, config)
            files.write_yaml(run.overrides, list(self._overrides))
        if manifest_text is not None and not has_manifest:
            files.write(run.manifest, manifest_text)

    def undo(self, run: RunDir) -> bool:
        """Restore a resumed run's directory to its state before this start; return whether this one had changed it."""
        if not self._before:
            return False
        run.result.unlink(missing_ok=True)
        for path, content in self._before.items():
            files.write_data(path, content)
        for copy in self._added:
            copy.unlink(missing_ok=True)
        return True
