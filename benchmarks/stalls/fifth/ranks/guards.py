"""Communication hooks for DistributedDataParallel."""
import torch
import torch.distributed as dist


def guarded(group, bucket):
    """Averages a bucket, and says at once where a gradient is no longer finite."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    if not torch.isfinite(buffer).all():
        raise FloatingPointError(f"bucket {bucket.index()} is not finite")
    dist.all_reduce(buffer, group=group)
    done = torch.futures.Future()
    done.set_result(buffer)
    return done


def averaged(group, bucket):
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda done: done.value()[0])
