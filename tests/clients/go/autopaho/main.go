// autopaho, MQTT 5: main PORT. A line for each step, in one order whoever answers.
package main

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"sort"
	"strings"
	"time"

	"github.com/eclipse/paho.golang/autopaho"
	"github.com/eclipse/paho.golang/autopaho/queue/memory"
	"github.com/eclipse/paho.golang/paho"
)

const (
	patience = 20 * time.Second
	pause    = 50 * time.Millisecond
	topic    = "autopaho/plant"
	kept     = 3_600 // seconds
	many     = 30
)

// A client whose messages and connections go to channels.
type client struct {
	*autopaho.ConnectionManager
	router   *paho.StandardRouter
	heard    chan string
	sessions chan bool // of each connection: whether there was a session
	lost     chan struct{}
}

func main() {
	if err := all(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("done")
}

func all(port string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	defer cancel()
	where, err := url.Parse("mqtt://127.0.0.1:" + port)
	if err != nil {
		return err
	}
	sender, err := connect(ctx, where, "autopaho-sender", nil)
	if err != nil {
		return err
	}
	receiver, err := connect(ctx, where, "autopaho-receiver", nil)
	if err != nil {
		return err
	}
	for _, step := range []func(context.Context, *url.URL, *client, *client) error{
		published, retained, willed, asked, cutOff,
	} {
		if err := step(ctx, where, sender, receiver); err != nil {
			return err
		}
	}
	if err := sender.Disconnect(ctx); err != nil {
		return err
	}
	return receiver.Disconnect(ctx)
}

func connect(ctx context.Context, where *url.URL, id string, will *paho.WillMessage) (*client, error) {
	made := &client{
		router:   paho.NewStandardRouter(),
		heard:    make(chan string, 1000),
		sessions: make(chan bool, 10),
		lost:     make(chan struct{}, 10),
	}
	made.router.DefaultHandler(func(message *paho.Publish) { made.heard <- shown(message) })
	configuration := autopaho.ClientConfig{
		ServerUrls:            []*url.URL{where},
		KeepAlive:             30,
		SessionExpiryInterval: kept,
		ReconnectBackoff:      autopaho.NewConstantBackoff(pause),
		Queue:                 memory.New(),
		WillMessage:           will,
		OnConnectionUp: func(_ *autopaho.ConnectionManager, connack *paho.Connack) {
			made.sessions <- connack.SessionPresent
		},
		OnConnectionDown: func() bool {
			made.lost <- struct{}{}
			return true
		},
		ClientConfig: paho.ClientConfig{
			ClientID: id,
			OnPublishReceived: []func(paho.PublishReceived) (bool, error){
				func(one paho.PublishReceived) (bool, error) {
					made.router.Route(one.Packet.Packet())
					return true, nil
				},
			},
		},
	}
	if will != nil {
		configuration.SessionExpiryInterval = 0
		configuration.DisconnectPacketBuilder = func() *paho.Disconnect {
			return &paho.Disconnect{ReasonCode: 0x04} // with its will
		}
	}
	var err error
	made.ConnectionManager, err = autopaho.NewConnection(ctx, configuration)
	if err != nil {
		return nil, err
	}
	select {
	case present := <-made.sessions:
		fmt.Println("connected", id, present)
		return made, nil
	case <-time.After(patience):
		return nil, fmt.Errorf("%s is not connected", id)
	}
}

func (c *client) subscribe(ctx context.Context, wanted ...paho.SubscribeOptions) error {
	answer, err := c.Subscribe(ctx, &paho.Subscribe{Subscriptions: wanted})
	if err != nil {
		return err
	}
	fmt.Println("granted", answer.Reasons)
	return nil
}

func (c *client) next(count int) ([]string, error) {
	var found []string
	for len(found) < count {
		select {
		case one := <-c.heard:
			found = append(found, one)
		case <-time.After(patience):
			return nil, fmt.Errorf("heard only %q", found)
		}
	}
	return found, nil
}

// say prints the next messages in the order in which they came.
func (c *client) say(word string, count int) error {
	found, err := c.next(count)
	if err == nil {
		fmt.Printf("%s %q\n", word, found)
	}
	return err
}

func shown(message *paho.Publish) string {
	said := message.Properties
	words := []string{message.Topic, fmt.Sprint(message.QoS), string(message.Payload)}
	if message.Retain {
		words = append(words, "retained")
	}
	if said.ContentType != "" {
		words = append(words, "type "+said.ContentType)
	}
	if said.MessageExpiry != nil {
		words = append(words, "expires")
	}
	if said.CorrelationData != nil {
		words = append(words, "for "+string(said.CorrelationData))
	}
	for _, one := range said.User {
		words = append(words, one.Key+"="+one.Value)
	}
	return strings.Join(words, " ")
}

func published(ctx context.Context, _ *url.URL, sender, receiver *client) error {
	err := receiver.subscribe(ctx,
		paho.SubscribeOptions{Topic: topic + "/0", QoS: 0},
		paho.SubscribeOptions{Topic: topic + "/1", QoS: 1},
		paho.SubscribeOptions{Topic: topic + "/2", QoS: 2})
	if err != nil {
		return err
	}
	for granted := range 3 {
		for qos := range byte(3) {
			expiry := uint32(100)
			_, err := sender.Publish(ctx, &paho.Publish{
				Topic: fmt.Sprintf("%s/%d", topic, granted), QoS: qos, Payload: []byte("grün"),
				Properties: &paho.PublishProperties{
					ContentType: "text/plain", MessageExpiry: &expiry,
					User: paho.UserProperties{{Key: "a", Value: "1"}, {Key: "a", Value: ""}},
				},
			})
			if err != nil {
				return err
			}
			if err := receiver.say("heard", 1); err != nil {
				return err
			}
		}
	}
	answer, err := receiver.Unsubscribe(ctx, &paho.Unsubscribe{Topics: []string{topic + "/0", topic + "/none"}})
	if answer != nil {
		fmt.Println("unsubscribed", answer.Reasons)
		return nil
	}
	return err
}

func retained(ctx context.Context, _ *url.URL, sender, receiver *client) error {
	for _, state := range []string{"on", ""} {
		_, err := sender.Publish(ctx, &paho.Publish{Topic: topic + "/state", QoS: 1, Payload: []byte(state), Retain: true})
		if err != nil {
			return err
		}
		wanted := paho.SubscribeOptions{Topic: topic + "/state", QoS: 2, RetainAsPublished: true}
		if err := receiver.subscribe(ctx, wanted); err != nil {
			return err
		}
		if err := receiver.say("retained", 1); err != nil {
			return err
		}
	}
	return nil
}

func willed(ctx context.Context, where *url.URL, _, receiver *client) error {
	if err := receiver.subscribe(ctx, paho.SubscribeOptions{Topic: topic + "/will", QoS: 2}); err != nil {
		return err
	}
	mortal, err := connect(ctx, where, "autopaho-mortal",
		&paho.WillMessage{Topic: topic + "/will", QoS: 2, Payload: []byte("gone")})
	if err != nil {
		return err
	}
	if err := mortal.Disconnect(ctx); err != nil {
		return err
	}
	return receiver.say("will", 1)
}

// asked is requests and their responses. The library's own extension for it drops a response that comes before it waits.
func asked(ctx context.Context, _ *url.URL, sender, receiver *client) error {
	receiver.router.RegisterHandler(topic+"/questions", func(message *paho.Publish) {
		go func() {
			_, err := receiver.Publish(ctx, &paho.Publish{
				Topic: message.Properties.ResponseTopic, Payload: append([]byte("re: "), message.Payload...),
				Properties: &paho.PublishProperties{CorrelationData: message.Properties.CorrelationData},
			})
			if err != nil {
				receiver.heard <- err.Error()
			}
		}()
	})
	if err := receiver.subscribe(ctx, paho.SubscribeOptions{Topic: topic + "/questions", QoS: 1}); err != nil {
		return err
	}
	if err := sender.subscribe(ctx, paho.SubscribeOptions{Topic: topic + "/answers", QoS: 1}); err != nil {
		return err
	}
	for n := range 2 {
		_, err := sender.Publish(ctx, &paho.Publish{
			Topic: topic + "/questions", QoS: 1, Payload: []byte("why"),
			Properties: &paho.PublishProperties{
				ResponseTopic: topic + "/answers", CorrelationData: []byte(fmt.Sprint(n)),
			},
		})
		if err != nil {
			return err
		}
		if err := sender.say("answered", 1); err != nil {
			return err
		}
	}
	return nil
}

// cutOff loses both connections while messages are under way, and each of them arrives once.
func cutOff(ctx context.Context, _ *url.URL, sender, receiver *client) error {
	if err := receiver.subscribe(ctx, paho.SubscribeOptions{Topic: topic + "/once/#", QoS: 2}); err != nil {
		return err
	}
	for n := range many {
		if n == many/2 {
			fmt.Println("cut me off")
		}
		err := sender.PublishViaQueue(ctx, &autopaho.QueuePublish{Publish: &paho.Publish{
			Topic: fmt.Sprintf("%s/once/%02d", topic, n), QoS: 2, Payload: []byte("once"),
		}})
		if err != nil {
			return err
		}
	}
	for _, one := range []*client{sender, receiver} {
		select {
		case <-one.lost:
		case <-time.After(patience):
			return fmt.Errorf("not cut off")
		}
		select {
		case present := <-one.sessions:
			fmt.Println("back", present)
		case <-time.After(patience):
			return fmt.Errorf("not back")
		}
	}
	found, err := receiver.next(many)
	if err != nil {
		return err
	}
	sort.Strings(found)
	fmt.Printf("each %q\n", found)
	if _, err := sender.Publish(ctx, &paho.Publish{Topic: topic + "/once/last", QoS: 2}); err != nil {
		return err
	}
	return receiver.say("and then", 1)
}
