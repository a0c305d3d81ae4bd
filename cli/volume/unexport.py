"""Stop serving a volume as an NBD device on this socket."""

import argparse

from cli.context import Context
from cli.volume import export


def arguments(parser: argparse.ArgumentParser) -> None:
    export.arguments(parser)


def run(context: Context) -> int:
    return export.serve(context, end=True)
