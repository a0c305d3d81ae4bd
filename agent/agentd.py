"""The entry point of agentd: the byte path of its programs, which are forks of it, is found before it is imported."""

from agent.compiled.files import use_in_agent


def main() -> None:
    use_in_agent()
    from agent.main import main as run

    run()
