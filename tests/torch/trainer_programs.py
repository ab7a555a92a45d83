"""Small trainings as people write them with a trainer, each with keepbusy's one line in it."""

TRANSFORMERS = """
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from keepbusy.integrations.transformers import TrainerRecording


class Numbers(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return {"x": torch.ones(16), "labels": torch.ones(1)}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def forward(self, x, labels):
        out = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


recording = TrainerRecording()
arguments = TrainingArguments(
    "out", max_steps=12, logging_steps=1, report_to=REPORT_TO, save_strategy="no", disable_tqdm=True
)
Trainer(Model(), arguments, train_dataset=Numbers(), callbacks=[recording]).train()
"""
LIGHTNING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from keepbusy.integrations.lightning import LightningRecording


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch, _):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        print(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


recording = LightningRecording()
batches = DataLoader(TensorDataset(torch.ones(96, 16), torch.ones(96, 1)), batch_size=8)
trainer = Trainer(
    accelerator="gpu", devices=1, max_epochs=1, logger=[TensorBoardLogger("logs"), CSVLogger("table")],
    callbacks=[recording], enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
)
trainer.fit(Model(), batches)
"""
ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from keepbusy.integrations.accelerate import AccelerateRecording

recording = AccelerateRecording("out")
accelerator = Accelerator(log_with=[recording])
accelerator.init_trackers("numbers")
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = DataLoader(TensorDataset(torch.ones(96, 16), torch.ones(96, 1)), batch_size=8)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for x, y in batches:
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.item()})
accelerator.end_training()
"""
