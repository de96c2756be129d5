"""The command line of a script."""

from __future__ import annotations

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from heads.errors import HeadwayError


def parse_arguments(parser: ArgumentParser) -> Namespace:
    """What the command line gives. Raises HeadwayError where it is wrong, for a parser made with `exit_on_error=False`."""
    try:
        return parser.parse_args()
    except ArgumentError as error:
        raise HeadwayError(f"{error}; see --help") from error
