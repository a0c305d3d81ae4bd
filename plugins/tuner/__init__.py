"""The tuner: which hosts of an elastic job carry how many of its ranks, and which own how many of its tables.

Paper: Cruise, in Woo-Yeon Lee, chapter 3, Seoul National University 2020. A job with parameter servers splits its hosts
into workers, which hold training data, and servers, which hold the model. Too few workers and computing takes long; too
few servers, and all hosts wait for the network. The best split depends on the algorithm, on its parameters and on the
hosts, and is not known before the job runs. So the tuner measures some mini-batches, finds the best split, and moves
the job there without stopping it, if that saves at least 5 %.

Covey's hosts are both by default, and that is twice as fast: 32 equal hosts that all work and serve need, by the
paper's own cost model, 0.49 to 0.55 of the epoch of the best split while computing takes up to four times as long as
the network. So what is searched is a role for each host out of worker, server and both, with its share of the ranks and
of the tables. And the number of ranks is fixed: more workers do not mean fewer rounds, as they do in equation 3.5.

    steps timed, cards measured -> search -> worth 5 %? -> one arrangement in the log -> steps timed -> was it right?

Nothing is moved by the tuner: ranks change processes and tables change owners by one entry of the scheduler's log
(`plugins.facts.ArrangementsWanted`). A job is tuned from the time on at which somebody asks for it (`agentctl tune`).

The paper finds a split of unequal hosts with a solver for mixed integer programs: 37 s for 32 hosts, and to within a
gap of 40 %. None is needed. Its own roles are searched exactly when the hosts are of few kinds, else by descent
(`policy/search.py`); ours by dynamic programming over hosts, in whole ranks and tables (`policy/division.py`).

Words. *worker*, *server*, *both*: what a host is to a job. *division*: ranks and tables of each host. *pass*: what a
process computes for one rank in a step. *block*, *mini-batch*: in the paper's plans, which only simulators perform.

    messages   what hosts measured               policy    division; and the paper's costs, splits and plans
    machine    `tuner`: of live jobs; `disjoint`: as the paper has it         service   measures, asks, shows
"""
