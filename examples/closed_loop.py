"""A control loop of your own: drive the built-in robot by a policy that is served in another terminal.

    relay serve demo
    python examples/closed_loop.py

For your robot, replace `Tabletop` by it, and `relay.demo.robot` by what turns its units into the policy's and back.
"""

import sys

import numpy as np

import relay
from relay.demo import robot
from relay.demo.drawing import render_all
from relay.demo.tabletop import MAX_STEPS, Tabletop

REPLAN_EVERY = 4  # actions to execute from each chunk of 16


def main(url: str = "ws://127.0.0.1:8000") -> None:
    with relay.Policy(url) as policy:
        for episode in range(5):
            table = Tabletop(np.random.default_rng(episode))
            prompt = robot.task_prompt(table.cube, table.plate)
            while not table.succeeded and table.steps < MAX_STEPS:
                observation = robot.observation(render_all(table), robot.robot_state(table), prompt)
                actions = policy.infer(observation)["actions"]  # (16, 4) float32, in the policy's units
                for command in robot.chunk_to_commands(actions[:REPLAN_EVERY], table.tool):
                    table.step(command)
            outcome = "done" if table.succeeded else "not done"
            print(f"{prompt}: {outcome} in {table.steps / 10:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
