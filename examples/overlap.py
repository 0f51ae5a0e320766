"""A control loop that does not stand still: the next chunk is asked for while the present one is played.

    relay serve demo
    python examples/overlap.py

The policy belongs to one background thread, since it serves one at a time. The actions for steps that were executed
while the call lasted are left out. For your robot, replace what `closed_loop.py` tells to replace.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import relay
from relay.demo import robot
from relay.demo.drawing import render_all
from relay.demo.tabletop import CONTROL_HZ, MAX_STEPS, Tabletop

REPLAN_EVERY = 6  # actions to execute from each chunk of 16
AHEAD = 2  # of them while the next chunk is on its way: the time of a call times the control rate, rounded up


def main(url: str = "ws://127.0.0.1:8000", episodes: str = "5") -> None:
    with relay.Policy(url, reconnect="always") as policy, ThreadPoolExecutor(max_workers=1) as background:

        def ask(observation, tool):
            actions = policy.infer(observation)["actions"]  # (16, 4) float32, in the policy's units
            return robot.chunk_to_commands(actions, tool)

        for episode in range(int(episodes)):
            table = Tabletop(np.random.default_rng(episode))
            policy.reset()
            commands = background.submit(ask, *observe(table)).result()
            late, due = 0, time.monotonic()
            while not over(table):
                due = play(table, commands[: REPLAN_EVERY - AHEAD], due)
                following = background.submit(ask, *observe(table))
                due = play(table, commands[REPLAN_EVERY - AHEAD : REPLAN_EVERY], due)
                late += not (following.done() or over(table))
                commands = following.result()[AHEAD:]  # waits, and the robot with it, if the call took longer
            outcome = "done" if table.succeeded else "not done"
            prompt = robot.task_prompt(table.cube, table.plate)
            print(f"{prompt}: {outcome} in {table.steps / CONTROL_HZ:.1f} s; {late} chunks came late")


def observe(table):
    """What the policy sees, and where the tool was then: actions are displacements from there."""
    prompt = robot.task_prompt(table.cube, table.plate)
    return robot.observation(render_all(table), robot.robot_state(table), prompt), table.tool


def play(table, commands, due):
    """Execute one command at each tick of the clock, until the episode is over; returns when the next tick is due."""
    for command in commands:
        if not over(table):
            time.sleep(max(0.0, due - time.monotonic()))
            table.step(command)
            due = max(due + 1 / CONTROL_HZ, time.monotonic())  # after a stop the clock goes on from there
    return due


def over(table):
    return table.succeeded or table.steps >= MAX_STEPS


if __name__ == "__main__":
    main(*sys.argv[1:])
