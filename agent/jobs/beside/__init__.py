"""Commands and shells beside the ranks of a job: `agentctl exec`, `agentctl shell`, tunnels to a port of its host.

    agentctl --HTTP--> any agent --control link--> agent of the rank's host --unix socket--> session (a program)
                                                                                               |
                                                                     pty or pipes --> the command, beside the rank

A *session* is a process of its own that the agent starts as it starts a job's supervisor: as the job's user, and in the
control group of the job's epoch, with its limits. It holds the command's terminal or pipes, so a command outlives
agents that restart, and a shell outlives the terminal that it was typed in. It ends with the job's supervisor. A
connection to a port of the rank's host has no process: its agent holds it, and it ends with that agent.

Bytes go in *turns* (`messages`): a question that says how much of the output has arrived, brings input from a known
offset on, and is answered with output from a known offset on. A turn that is lost or repeated changes nothing, so no
agent on the way keeps anything; what a session holds unread is bounded, and a command whose output nobody takes waits
(`streams`).
"""
