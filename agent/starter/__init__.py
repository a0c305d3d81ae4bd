"""The starter: the one root process of a host that starts programs, for one user alone: the agent's.

    agent --unix socket, SO_PEERCRED--> starter --systemd's manager, or fork--> supervisor, spares: as the job's user
                                           +--> FOLDER/jobs/JOB  drwxrwx---  the job's user, and the agent

It has four verbs (`agent.ports.starter.starter_wire`), reads no file of the agent, is configured by its arguments, and
has no network. It takes the agent's word for whose job a job is, within what it was told: never root, never the agent's
own user, no user under `--uid-min` that `--allow` does not name, and only where the name has that number on the host.
What runs as the user is one of two programs of the installation that the starter itself runs from.
"""
