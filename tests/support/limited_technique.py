"""A technique of one's own whose third step asks for more memory than there is."""

import textwrap

from command_line import CommandLine

SOURCE = '''
    """Limited: in its third step a process asks for more memory than it may have.

    Paper     none.
    Promise   nothing.
    """

    from dataclasses import dataclass
    from pathlib import Path

    import torch

    from thrifty.core.stages import Stage
    from thrifty.core.technique import Numerics, Technique


    @dataclass(frozen=True)
    class Limited(Technique):
        stage, numerics = Stage.CLIP, Numerics.DIFFERENT

        def backward(self, backward):
            steps = []

            def limited(model, objective, batch):
                steps.append(len(steps))
                if len(steps) == 3:
                    {exhaust}
                return backward(model, objective, batch)

            return limited
'''


def add_limited(thrifty: CommandLine, exhaust: str) -> None:
    """Let the command line know the technique; `exhaust` are the statements of its third step."""
    home = thrifty.folder / "techniques"
    home.mkdir()
    statements = textwrap.indent(textwrap.dedent(exhaust).strip(), " " * 16)
    (home / "limited.py").write_text(textwrap.dedent(SOURCE).replace("                {exhaust}", statements))
    thrifty.environment["THRIFTY_TECHNIQUES"] = str(home)
