"""PPO as small repositories write it: rollouts, several backward passes an update, two heads."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

UPDATES, HORIZON, EPOCHS, MINIBATCHES, GAMMA, CLIP = 4, 64, 3, 4, 0.95, 0.2


class Walk:
    """A walker on a line: it is rewarded for being near the goal, which it sees."""

    def __init__(self, seed):
        self.random = torch.Generator().manual_seed(seed)
        self.reset()

    def reset(self):
        self.place = 4 * torch.rand(1, generator=self.random) - 2
        return self.see()

    def see(self):
        return torch.cat([self.place, self.place.square(), torch.ones(1)])

    def step(self, action):
        self.place = self.place + 0.3 * (action - 1) + 0.05 * torch.randn(1, generator=self.random)
        return self.see(), -self.place.abs().item()


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x, only_value=False):
        h = self.body(x)
        value = self.critic(h).squeeze(-1)
        return value if only_value else (self.actor(h), value)


@torch.no_grad()
def rollout(agent, env, seen, random):
    observations, actions, chances, rewards, values = [], [], [], [], []
    for _ in range(HORIZON):
        logits, value = agent(seen)
        action = torch.multinomial(logits.softmax(-1), 1, generator=random).squeeze()
        observations.append(seen)
        actions.append(action)
        chances.append(Categorical(logits=logits).log_prob(action))
        values.append(value)
        seen, reward = env.step(action.item())
        rewards.append(reward)
    returns, following = [], agent(seen, only_value=True)
    for reward in reversed(rewards):
        following = reward + GAMMA * following
        returns.insert(0, following)
    return seen, [torch.stack(x) for x in (observations, actions, chances, returns, values)]


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    agent = DDP(Agent(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(agent.parameters(), 3e-3, eps=1e-5)
    env, random = Walk(10 + rank), torch.Generator().manual_seed(20 + rank)
    seen = env.reset()
    for update in range(UPDATES):
        seen, (states, actions, old, returns, values) = rollout(agent.module, env, seen, random)
        advantage = returns - values
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for _ in range(EPOCHS):
            for chosen in torch.randperm(HORIZON, generator=random).chunk(MINIBATCHES):
                logits, _value = agent(states[chosen])
                policy = Categorical(logits=logits)
                ratio = (policy.log_prob(actions[chosen]) - old[chosen]).exp()
                gain = advantage[chosen]
                actor = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
                loss = actor - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()  # of the actor: nothing reaches the critic
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                critic = (agent(states[chosen], only_value=True) - returns[chosen]).square().mean()
                optimizer.zero_grad()
                critic.backward()  # and of the critic, through the same body
                optimizer.step()
        told = torch.tensor([actor.item(), critic.item(), returns.mean().item()]) / size
        dist.all_reduce(told)
        if rank == 0:
            print("update {}: actor {:.6f}, critic {:.6f}, return {:.6f}".format(update, *told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
