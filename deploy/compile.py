"""Compilation of the modules on the message path with mypyc, unchanged from their Python source.

`python deploy/compile.py` builds in place: beside each module it puts an extension that Python imports
instead, until `python deploy/compile.py --remove`. For a wheel this file is a build hook of hatchling:
`HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 pip wheel .` makes a wheel for this interpreter and processor. Both need a C
compiler, mypy with setuptools, and the dependencies of the gateway, because mypy reads their types.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT: Final = Path(__file__).resolve().parent.parent
BUILD: Final = ROOT / "build" / "compiled"
OPTIMIZATION: Final = "2"  # 3 compiles 50 % longer, without a measurable gain
# No other library calls or replaces functions of the extension, so calls within it are direct, and calls of
# the interpreter's functions need no procedure linkage table.
DIRECTLY: Final = ("-fvisibility=hidden", "-fno-plt")

# Modules that are called for each message.
COMPILED: Final = (
    "gateway/broker/{bodies,deduplication,dispatcher,journal,memory,memory_shares,poison,pressure}.py",
    "gateway/broker/{routing,shares,tracing}.py",
    "gateway/broker/{storage,topics,undelivered}.py",
    "gateway/broker/amqp091/{dead_letter_routing,deliveries,exchange,hosts,unbound,virtual_host}.py",
    "gateway/broker/mqtt/*.py",
    "gateway/broker/outbox/*.py",
    "gateway/egress/{confirms,connection,link,session}.py",
    "gateway/egress/*/{consumer,publisher,receiver,session}.py",
    "gateway/engine/*.py",
    "gateway/ingress/{client,delivery_limit,handshake,listener,source,waiting_publishes}.py",
    "gateway/ingress/amqp091/*.py",
    "gateway/ingress/amqpfast/{channel,commands,connection,ingress,publisher}.py",
    "gateway/ingress/mqtt/*.py",
    "gateway/mapping/{compiler,conditions,message_ids,names,patterns,reply_routes,return_addresses}.py",
    "gateway/mapping/{router,routes,templates}.py",
    "gateway/model/*.py",
    "gateway/protocols/*/*.py",
    "gateway/store/journal/{bursts,column_buffers,encoder,entries,format,runs,wall,wires,writer}.py",
    "gateway/store/properties.py",
    "gateway/telemetry/{stats,watchdog}.py",
    "gateway/transport/{backlog,filter_stack,poller,socket_loop,stream}.py",
)

# Modules that mypyc cannot compile, or that would be slower.
INTERPRETED: Final = (
    "**/__init__.py",
    "gateway/broker/mqtt/system.py",  # runs every few seconds
    "gateway/engine/stored_values.py",  # classes that pydantic builds
    "gateway/model/dialect.py",  # an additional protocol inherits from it
    "gateway/model/spooled_bodies.py",  # classes that are `bytes`
    "gateway/model/times.py",  # classes for the type checker only
    "gateway/protocols/*/dialect.py",
    "gateway/protocols/amqp091/{methods,spec}.py",  # each method is a dataclass with slots
    "gateway/protocols/amqpfast/commands.py",
    "gateway/protocols/mqtt/packets.py",
)


def _found(patterns: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files that match glob patterns, relative to the root. `{a,b}` stands for either name.

    Raises SystemExit if a name matches no file.
    """
    for pattern in patterns:
        head, brace, rest = pattern.partition("{")
        names, _, tail = rest.partition("}")
        for name in names.split(","):
            one = f"{head}{name}{tail}" if brace else pattern
            found = sorted(ROOT.glob(one))
            if not found:
                raise SystemExit(f"deploy/compile.py: {one} matches no file")
            yield from (path.relative_to(ROOT) for path in found)


def sources() -> list[Path]:
    """Return the modules that are compiled, relative to the root."""
    return sorted(set(_found(COMPILED)) - set(_found(INTERPRETED)))


def artifacts() -> list[Path]:
    """Return the extensions beside the modules, relative to the root."""
    found = (*ROOT.glob("*__mypyc.*.so"), *(ROOT / "gateway").rglob("*.so"))
    return sorted(path.relative_to(ROOT) for path in found)


def is_stale() -> bool:
    """Return True if an extension is older than the newest source file."""
    built = [(ROOT / path).stat().st_mtime for path in artifacts()]
    made_of = max(path.stat().st_mtime for path in (*(ROOT / "gateway").rglob("*.py"), Path(__file__)))
    return bool(built) and min(built) < made_of


def remove() -> None:
    """Delete all extensions beside the modules."""
    for path in artifacts():
        (ROOT / path).unlink()


def build() -> None:
    """Build the extensions in place, unless all are newer than every source file."""
    if artifacts() and not is_stale():
        return
    remove()
    os.chdir(ROOT)  # mypy reads its configuration there, and the linker puts extensions beside their modules
    from mypyc.build import mypycify
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext
    from setuptools.modified import newer_group

    class Build(build_ext):
        """Build command that compiles the files of an extension in parallel."""

        def build_extension(self, ext: Extension) -> None:
            def compiled(source: str) -> list[str]:
                made: list[str] = self.compiler.object_filenames([source], output_dir=self.build_temp)
                if not newer_group([source, *ext.depends], made[0]):
                    return made
                return self.compiler.compile(
                    [source],
                    output_dir=self.build_temp,
                    include_dirs=ext.include_dirs,
                    extra_postargs=ext.extra_compile_args,
                    depends=ext.depends,
                )

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = [made for each in pool.map(compiled, ext.sources) for made in each]
            self.compiler.link_shared_object(
                objects,
                self.get_ext_fullpath(ext.name),
                export_symbols=self.get_export_symbols(ext),
                build_temp=self.build_temp,
                target_lang="c",
            )

    extensions = mypycify(
        [str(path) for path in sources()],
        opt_level=OPTIMIZATION,
        debug_level="0",
        multi_file=True,
        target_dir=str(BUILD),
        group_name="gateway",
    )
    if sys.platform == "linux":
        for extension in extensions:  # all extensions share one list
            extension.extra_compile_args = [*extension.extra_compile_args, *DIRECTLY]
    distribution = Distribution({"name": "gateway", "ext_modules": extensions})
    distribution.cmdclass["build_ext"] = Build
    command = distribution.get_command_obj("build_ext")
    command.inplace = True
    command.build_temp = command.build_lib = str(BUILD)
    command.ensure_finalized()
    command.run()
    for path in artifacts():
        (ROOT / path).touch()  # also extensions that were not rebuilt are up to date now


class CompiledWheel(BuildHookInterface[Any]):
    """Build hook that adds the extensions to a wheel, which is then for this interpreter and processor."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the extensions, unless `version` is `editable`: then the source itself is installed."""
        if version == "editable":
            return
        build()
        build_data["infer_tag"] = True
        build_data["pure_python"] = False
        build_data["force_include"].update({str(ROOT / path): str(path) for path in artifacts()})


def main() -> None:
    """Build, delete or check the extensions, as the command line requests."""
    parser = argparse.ArgumentParser(description="Compile the gateway in place.")
    parser.add_argument("--remove", action="store_true", help="Delete the extensions.")
    parser.add_argument("--check", action="store_true", help="Fail if an extension is older than its source.")
    chosen = parser.parse_args()
    if chosen.remove:
        remove()
    elif chosen.check:
        if is_stale():
            sys.exit("an extension is older than its source; run `make compile` or `make pure`")
    else:
        build()


if __name__ == "__main__":
    main()
