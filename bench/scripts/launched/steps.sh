#!/bin/bash
# Steps within a job, as other schedulers have them.
set -e
agentctl step --workers 1 -- python -c "print('prepared')"
agentctl step --workers 2 -- python by_hand.py
