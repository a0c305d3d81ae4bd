"""Print the script that completes agentctl's commands, options and names in a shell.

    source <(agentctl completion bash)          in ~/.bashrc
    source <(agentctl completion zsh)           in ~/.zshrc, after compinit
    agentctl completion fish | source           in ~/.config/fish/config.fish

The Debian package has all three where the shells look by themselves. Names of jobs, hosts, tenants and volumes are
those that the agent of this host knows now; where none answers within 150 ms there are none, without a word.

The script calls `agentctl completion SHELL -- WORDS`, which prints what may stand in the place of the last word."""

import argparse

from cli.completion.candidates import Candidate, candidates
from cli.completion.names import Names
from cli.completion.scripts import SCRIPTS
from cli.context import Context


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell that the script is for")


def run(context: Context) -> int:
    shell, words = context.args.shell, getattr(context.args, "command", None)
    if words is None:
        context.say(SCRIPTS[shell].strip())
        return 0
    found = candidates(words or [""], Names(context.agent).of)
    for line in [":files"] if found is None else [lined(shell, each) for each in found]:
        context.say(line)
    return 0


def lined(shell: str, candidate: Candidate) -> str:
    """One candidate as the script of that shell reads it: zsh and fish show what it is, too."""
    word, about = candidate
    if shell == "zsh":
        word = word.replace("\\", "\\\\").replace(":", "\\:")
        return f"{word}:{about}" if about else word
    return f"{word}\t{about}" if about and shell == "fish" else word
