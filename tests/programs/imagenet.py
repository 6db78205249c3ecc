"""An image classifier in the style of PyTorch's imagenet example: BatchNorm, validation, meters."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Images(Dataset):
    """Bright squares: the class is the quarter of the picture that has one."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.classes = torch.randint(4, (count,), generator=generator)
        self.images = torch.randn(count, 3, 16, 16, generator=generator)
        for image, where in zip(self.images, self.classes.tolist(), strict=False):
            top, left = 8 * (where // 2), 8 * (where % 2)
            image[:, top : top + 8, left : left + 8] += 0.7

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.classes[index]


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x):
        return torch.relu(self.body(x) + self.short(x))


def make_model():
    return nn.Sequential(
        Residual(3, 16, 2),
        Residual(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


class Meter:
    """A mean over all ranks."""

    def __init__(self):
        self.total = torch.zeros(2, dtype=torch.float64)

    def update(self, value, count):
        self.total += torch.tensor([value * count, count], dtype=torch.float64)

    def mean(self):
        dist.all_reduce(self.total)
        return (self.total[0] / self.total[1]).item()


def train(loader, model, criterion, optimizer):
    meter = Meter()
    model.train()
    for images, target in loader:
        output = model(images)
        loss = criterion(output, target)
        meter.update(loss.item(), len(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return meter.mean()


def validate(loader, model, criterion):
    losses, hits = Meter(), Meter()
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images)
            losses.update(criterion(output, target).item(), len(images))
            hits.update((output.argmax(1) == target).float().mean().item(), len(images))
    return losses.mean(), hits.mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    training, held_out = Images(192, 1), Images(48, 2)
    sampler = DistributedSampler(training)
    loader = DataLoader(training, 16, sampler=sampler, drop_last=True)
    validation = DataLoader(
        held_out, 16, sampler=DistributedSampler(held_out, shuffle=False, drop_last=True)
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        loss = train(loader, model, criterion, optimizer)
        held, accuracy = validate(validation, model, criterion)
        schedule.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.6f}, validation {held:.6f}, accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
